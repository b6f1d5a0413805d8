"""The shared vocabulary. No behaviour beyond hashing."""
