"""Who may ask, for what, and how much: keys from a file, and limits by key and by model."""

from kvyard.server.gateway.access.keys import AccessKey, KeyFile, KeyRing, read_keys
from kvyard.server.gateway.access.rates import RateAdmission, RateTicket

__all__ = ["AccessKey", "KeyFile", "KeyRing", "RateAdmission", "RateTicket", "read_keys"]
