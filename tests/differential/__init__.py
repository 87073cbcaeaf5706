"""Random training steps, run planned and unplanned, and compared.

`draw` makes a `Program` and `Wishes` from a chooser; `build` turns a program into a
step with its arguments; `judge` runs both and says what came of it. A program is data:
one integer seed makes it, and it can be simplified field by field.
"""
