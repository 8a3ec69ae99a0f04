"""The averages of other libraries beside modkit's, and the test suites of two of them.

Each case of a suite is that of the library's own suite, written anew. It runs on the library and on `modkit.EMA`. An
adapter maps names alone: if a case needs more than another name, modkit lacks something.
"""
