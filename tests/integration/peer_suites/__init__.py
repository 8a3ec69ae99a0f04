"""The test suites of other libraries, with their names mapped to modkit's.

Each case is that of the library's own suite, written anew. It runs on the library and on `modkit.EMA`. An
adapter maps names alone: if a case needs more than another name, modkit lacks something.
"""
