"""Snowskin: Mooncake, the KVCache-centric disaggregated serving system, as one Python package."""

__version__ = "0.1.0"
