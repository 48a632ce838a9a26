"""These modules put reasons, health, gates, plans and requests in words, beside the API's codes.

The console and the command line show these texts unchanged.
"""
