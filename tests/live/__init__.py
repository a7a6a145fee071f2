"""Live ranks that serve many tests, and the code that runs on them.

`ranks` starts and drives them; `server` is the program they run; `sheet` is what
test code on the ranks is written with; `*_on_ranks` are the tests' other halves.
"""
