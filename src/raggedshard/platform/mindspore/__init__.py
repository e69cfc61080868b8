"""The MindSpore backend (PyNative mode)."""
