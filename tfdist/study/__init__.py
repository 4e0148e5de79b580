"""Comparisons of strategies: what is to be measured, the measuring, and what the runs say together.

    plan      the cells of a study: model, dataset, global batch size, strategy, workers
    measure   runs each cell once a round, in processes of its own, the cells in turns
    runs      what was measured, read from run folders
    ratios    speed within rounds, with an interval
    work      whether the runs of a case did equal work, and learnt
    results   the figures of each cell, for a report
    summary   what the runs say in words and numbers
    text      the report in Markdown
    charts    the pictures
    page      the report as a page
    serve     shows the page at this machine's own address

`tfdist.compare` and `tfdist.report` are the commands.
"""
