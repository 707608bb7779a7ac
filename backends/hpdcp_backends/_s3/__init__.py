"""The parts of the backend `s3`: requests, the two ways to read, uploads, retries, options, and words for failures."""
