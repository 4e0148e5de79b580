"""Comparisons of strategies: what is to be measured, the measuring, and what the runs say together.

    plan      the cells of a study: model, dataset, global batch size, strategy, workers
    measure   runs each cell once a round, in processes of its own, the cells in turns
    runs      what was measured, read from run folders
    ratios    speed within rounds, with an interval
    work      whether the runs of a case did equal work, and learnt
    results   the figures of each cell, for a report
    text      the report in Markdown, and the lines that the command shows

`tfdist.compare` and `tfdist.report` are the commands.
"""
