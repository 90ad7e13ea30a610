"""The verbs as they are typed: the options of each in a file beside its verb's, which is loaded when the command runs.

Only typer and the errors are imported here, so that ``--help`` and usage errors answer at once.
"""
