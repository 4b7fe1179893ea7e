"""One request in many circumstances: its tokens and logprobs must be the same bits in all of them.

`python -m bench.exactness` shows it as a table; the tests run the same circumstances. A model under
test is an argument everywhere (`Subject`), so that a new weight or KV format is one more of them.

    trace            what one request gave, bit by bit
    watch, session   one engine over the subject's programs, and what its runner was given
    subject          the model under test
    probes           requests under test, and the neighbours' kinds of sampling
    circumstance     what a circumstance is, and the laboratory that compares
    company, places, chunks, pages, preemption, restart     the circumstances
    suite            all of them
    constraints      what exactness costs
"""
