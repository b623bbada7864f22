"""Load shared between gateways through Redis or Valkey: ``load_sharing`` tells and hears, ``peers`` books what others have
under way, ``lua/beat.lua`` is the server's part.
"""

from kvyard.server.gateway.sharing.load_sharing import LoadSharing, probe

__all__ = ["LoadSharing", "probe"]
