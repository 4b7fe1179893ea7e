"""Tool calls in what a model says: formats, their parsers, and the grammars that force them.

No HTTP, no engine, no tokenizer: text comes in, content and calls go out.
"""
