"""The earlier home of `hpdcp.offline_transform.convert_dcp_to_dcp`."""

from hpdcp._convert.copy import convert_dcp_to_dcp

__all__ = ["convert_dcp_to_dcp"]
