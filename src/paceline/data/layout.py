"""Layouts: samples by their ids to batches on the device. A room for each; this is the door."""

from __future__ import annotations

from paceline.data.image_layout import ImageLayout
from paceline.data.packed_layout import PackedLayout, bucket_for
from paceline.data.padded_layout import PaddedLayout
from paceline.data.resident import resident_bytes
from paceline.data.windowed_layout import WindowedLayout

__all__ = ["ImageLayout", "PackedLayout", "PaddedLayout", "WindowedLayout", "bucket_for", "resident_bytes"]
