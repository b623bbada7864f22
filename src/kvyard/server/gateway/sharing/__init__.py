"""Load that is shared: ``bookings`` is what each part sends and receives, ``peers`` books the requests of others in flight.
``load_sharing`` does it between gateways, through Redis or Valkey, of which ``lua/beat.lua`` is the server's part;
processes of one gateway do it by their own channel (``kvyard.server.gateway.processes``).
"""

from kvyard.server.gateway.sharing.bookings import SharedBookings
from kvyard.server.gateway.sharing.load_sharing import LoadSharing, probe

__all__ = ["LoadSharing", "SharedBookings", "probe"]
