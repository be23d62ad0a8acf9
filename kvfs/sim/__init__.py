"""Real request traces against a store: reading them, making their tokens, replaying them.

Nothing else of kvfs imports this package; it imports the store facade and nothing below it. Its
modules need numpy, so a command imports them only when it runs a trace.
"""
