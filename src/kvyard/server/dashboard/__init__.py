"""The dashboard: one page that shows a fleet while it works. A server hands in a source of views; it knows no engine.

``kvyard.server.dashboard.view`` has the structs a source fills, ``kvyard.server.dashboard.routes`` the routes.
"""
