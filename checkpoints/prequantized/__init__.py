"""Folders that other tools have quantized, read as if they were ours.

source.py decides by config.json; each method has a file that knows its layout.
"""
