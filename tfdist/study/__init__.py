"""Comparisons of strategies: the plan of a study, its measurement, and its report.

    plan      the cells of a study: model, dataset, global batch size, strategy, workers
    measure   runs each cell once per round, in separate processes, with the cells taking turns
    conditions  other programs on the cores, and the speed of the processor, during a run
    runs      the measured runs, read from run folders
    ratios    speed ratios within rounds, with a confidence interval
    looks     after how many rounds a study looks at its results, with which share of its probability of error
    stages    the runs between two looks
    work      whether the runs of a case did equal work, and whether they learned
    results   the figures of each cell
    verdicts  what bounds the training
    doubts    what makes figures doubtful
    summary   the results in sentences and tables, and the report in Markdown
    charts    the pictures
    machine_readable  the report as JSON
    page      the report as an HTML page, and its web server
    prices    prices of machines

`tfdist.compare` and `tfdist.report` are the commands.
"""
