"""The test suites of third-party libraries on torch and on modkit: ``nox -s suites``."""
