"""`python -m hpdcp`, and with it `torchrun -m hpdcp`."""

from __future__ import annotations

from hpdcp.cli import main

if __name__ == "__main__":
    main()
