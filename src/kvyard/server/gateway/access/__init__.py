"""Access: keys from a file, and limits by key and by model."""

from kvyard.server.gateway.access.keys import AccessKey, KeyFile, KeyRing, read_keys
from kvyard.server.gateway.access.rates import RateAdmission, RateTicket
from kvyard.server.gateway.access.tenancy import check_models, check_unknown, salt_of, with_salt

__all__ = [
    "AccessKey",
    "KeyFile",
    "KeyRing",
    "RateAdmission",
    "RateTicket",
    "check_models",
    "check_unknown",
    "read_keys",
    "salt_of",
    "with_salt",
]
