"""Every feature meets every situation once: the README says how."""
