"""What another package may bring: a store in one SQLite file, and a layout of one file for each item."""

from cupboard_hpdcp.backend import CupboardBackend
from cupboard_hpdcp.layout import DrawersLayout

__all__ = ["CupboardBackend", "DrawersLayout"]
