"""Callbacks for the trainers of other libraries; each module needs the package in its name."""
