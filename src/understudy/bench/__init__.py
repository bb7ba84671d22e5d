"""Measure methods against the papers' figures: declared cells, resumable runs, a rendered page.

    cells     what a measurement is, and how it is recognised
    suites    the papers' tables, the cross-method table, the guard: every cell declared
    runner    measure cells one by one, on whatever device is there; one JSON line each
    render    docs/results.md and its figures, from the lines
    command   `understudy bench`

A bench reads public benchmarks and throws its ledgers away. It is no tool for private records.
"""
