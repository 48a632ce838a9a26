"""What the API says beside its codes: reasons, health, gates, plans and requests in words.

The console and the command line show these texts unchanged.
"""
