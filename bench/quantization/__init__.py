"""What each format of one model's weights costs and brings: `python -m bench.quantization`.

Measures quality from inside, as certificates do, and speed through `LLM`.

    variants   the formats: how each is opened, and how it is served
    rows       one format's figures
    command    the command line and the table
"""
