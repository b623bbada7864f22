"""The scripts that run inside the server. Each is atomic, and each begins by asking whether it may run at all.

What is kept, by key (``docs/redis-index.md`` says why):

- ``kvyard:<namespace>``, a hash: the server's run, the epoch, the identity of the index, and epochs that are void.
- ``kvy:<epoch>r<key, 8 bytes>``, a string: a row, one bit per slot.
- ``kvy:<epoch>:p<slot>``, a set: the keys that a slot holds. ``:dir``, a hash from slot to owner and place; ``:own:<owner>``
  the other way round. ``:free`` and ``:retired``, sets of slots; ``:next`` the first that was never used.
- ``kvy:<epoch>:lease:<owner>``, a string with a time to live: the replica that writes. ``:fence``, a hash from owner to the
  token of the last who got the lease; ``:token`` the last token. ``:say:<owner>``, a hash of what the writer says of streams.
- ``kvy:<epoch>:version`` counts whatever changes the meaning of a row; ``:rows`` counts rows.

Only integers below 2^53 and byte strings occur, since Lua's numbers are floats.
"""

from __future__ import annotations

import hashlib


class Script:
    """Lua, and the digest the server knows it by."""

    __slots__ = ("digest", "name", "source")

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self.digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


_EPOCH = """
local call = redis.call
if call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return {'epoch'} end
local e = 'kvy:' .. ARGV[1]
"""

_TIDY = """
-- Sets or clears a slot's bit in the rows of some keys; returns how many rows there are more. Whole chunks take three calls,
-- since a call costs more than all that Lua does here, and neighbours mostly have equal rows, so each is worked out once.
local function paint(slot, names, value)
    local byte, mask = math.floor(slot / 8) + 1, 2 ^ (7 - slot % 8)
    local known, pairs_, dead, more = {}, {}, {}, 0
    for i, old in ipairs(call('MGET', unpack(names))) do
        old = old or ''
        local new = known[old]
        if not new then
            local padded = old .. string.rep('\\0', byte - #old)
            local was = string.byte(padded, byte)
            local now = value == 1 and bit.bor(was, mask) or bit.band(was, 255 - mask)
            new = string.sub(padded, 1, byte - 1) .. string.char(now) .. string.sub(padded, byte + 1)
            new = string.gsub(new, '%z+$', '')
            known[old] = new
        end
        if new ~= old then
            if new == '' then
                dead[#dead + 1] = names[i]
                more = more - 1
            else
                pairs_[#pairs_ + 1] = names[i]
                pairs_[#pairs_ + 1] = new
                if old == '' then more = more + 1 end
            end
        end
    end
    if #pairs_ > 0 then call('MSET', unpack(pairs_)) end
    if #dead > 0 then call('DEL', unpack(dead)) end
    return more
end
-- A slot's rows mean nothing from now on; they are swept later.
local function retire(slot)
    call('HDEL', e .. ':dir', slot)
    call('SADD', e .. ':retired', slot)
end
-- All that an owner has goes, in one stroke.
local function disown(owner)
    for _, slot in ipairs(call('HVALS', e .. ':own:' .. owner)) do retire(slot) end
    call('DEL', e .. ':own:' .. owner, e .. ':say:' .. owner)
    call('INCR', e .. ':version')
end
"""

BEGIN = Script(
    "begin",
    """
-- run, a new epoch's name, identity -> epoch, identity. Another run of the server, or none known: all before is void.
local known = redis.call('HMGET', KEYS[1], 'run', 'epoch', 'identity')
if known[1] == ARGV[1] and known[2] then return {known[2], known[3] or ''} end
if known[2] then redis.call('SADD', KEYS[1] .. ':void', known[2]) end
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'epoch', ARGV[2], 'identity', ARGV[3])
return {ARGV[2], ARGV[3]}
""",
)

ACQUIRE = Script(
    "acquire",
    _EPOCH
    + _TIDY
    + """
-- epoch, owner, replica, milliseconds -> token, unless another replica has the lease. What was announced before is void.
local owner, replica = ARGV[2], ARGV[3]
local lease = e .. ':lease:' .. owner
local holder = call('GET', lease)
if holder and holder ~= replica then return {'held', holder, call('PTTL', lease)} end
local token = call('INCR', e .. ':token')
call('HSET', e .. ':fence', owner, token)
call('SET', lease, replica, 'PX', ARGV[4])
disown(owner)
return {'ok', token}
""",
)

RENEW = Script(
    "renew",
    _EPOCH
    + """
-- epoch, replica, milliseconds, then owner and token in turn -> the owners that were lost.
local lost = {'ok'}
for i = 4, #ARGV, 2 do
    if call('HGET', e .. ':fence', ARGV[i]) == ARGV[i + 1] then
        call('SET', e .. ':lease:' .. ARGV[i], ARGV[2], 'PX', ARGV[3])
    else
        lost[#lost + 1] = ARGV[i]
    end
end
return lost
""",
)

RELEASE = Script(
    "release",
    _EPOCH
    + """
-- epoch, then owner and token in turn: the leases end, nobody vouches for the rows any more.
for i = 2, #ARGV, 2 do
    if call('HGET', e .. ':fence', ARGV[i]) == ARGV[i + 1] then call('DEL', e .. ':lease:' .. ARGV[i]) end
end
return {'ok'}
""",
)

DROP = Script(
    "drop",
    _EPOCH
    + _TIDY
    + """
-- epoch, owner, token: the owner is gone for good. Without a token only if nobody has its lease.
local owner, lease = ARGV[2], e .. ':lease:' .. ARGV[2]
if ARGV[3] == '' then
    if call('EXISTS', lease) == 1 then return {'held'} end
elseif call('HGET', e .. ':fence', owner) ~= ARGV[3] then
    return {'fenced'}
end
disown(owner)
call('DEL', lease)
call('HDEL', e .. ':fence', owner)
return {'ok'}
""",
)

WRITE = Script(
    "write",
    _EPOCH
    + _TIDY
    + """
-- epoch, owner, token, then (operation, name, keys or text) in turn. Nothing is done unless the token is the owner's last.
local owner = ARGV[2]
if call('HGET', e .. ':fence', owner) ~= ARGV[3] then return {'fenced'} end
local row, own, changed, rows = e .. 'r', e .. ':own:' .. owner, false, 0
for at = 4, #ARGV, 3 do
    local operation, name, text = ARGV[at], ARGV[at + 1], ARGV[at + 2]
    if operation == 's' or operation == 'd' then
        -- Store or delete keys of a place.
        local stores = operation == 's'
        local slot = call('HGET', own, name)
        if stores and not slot then
            slot = call('SPOP', e .. ':free') or tostring(call('INCR', e .. ':next') - 1)
            call('HSET', own, name, slot)
            call('HSET', e .. ':dir', slot, #owner .. ':' .. owner .. name)
            changed = true
        end
        for low = 1, slot and #text or 0, 2048 do
            local names, members = {}, {}
            for i = low, math.min(low + 2047, #text), 8 do
                local key = string.sub(text, i, i + 7)
                members[#members + 1] = key
                names[#names + 1] = row .. key
            end
            rows = rows + paint(tonumber(slot), names, stores and 1 or 0)
            call(stores and 'SADD' or 'SREM', e .. ':p' .. slot, unpack(members))
        end
    elseif operation == 'c' then
        local slot = call('HGET', own, name)
        if slot then
            retire(slot)
            call('HDEL', own, name)
            changed = true
        end
    elseif operation == 'f' then
        call('HDEL', e .. ':say:' .. owner, name)
        changed = true
    else
        -- 'y' says something that changes what rows are worth, 'h' merely that the writer is alive.
        call('HSET', e .. ':say:' .. owner, name, text)
        changed = changed or operation == 'y'
    end
end
if changed then call('INCR', e .. ':version') end
if rows ~= 0 then call('INCRBY', e .. ':rows', rows) end
return {'ok'}
""",
)

_STATE = """
-- Version, the directory, and per owner: name, token, replica, milliseconds left, what it says.
local function state()
    local owners = {}
    local fences = call('HGETALL', e .. ':fence')
    for i = 1, #fences, 2 do
        local lease = e .. ':lease:' .. fences[i]
        owners[#owners + 1] = {fences[i], fences[i + 1], call('GET', lease) or '', call('PTTL', lease),
                               call('HGETALL', e .. ':say:' .. fences[i])}
    end
    return {call('GET', e .. ':version') or '0', call('HGETALL', e .. ':dir'), owners}
end
"""

STATE = Script("state", _EPOCH + _STATE + "return {'ok', state()}")

LOOKUP = Script(
    "lookup",
    _EPOCH
    + _STATE
    + """
-- epoch, known version, keys, holes -> the state unless its version is known, then where each run of equal rows ends, and its
-- row. State and rows are of one moment: a slot never means what it meant before.
local known = (call('GET', e .. ':version') or '0') == ARGV[2]
local row, text, holes = e .. 'r', ARGV[3], ARGV[4] == '1'
local out, last, at = {'ok', known and 0 or state()}, nil, 0
local low, high = 1, 0
-- A few keys first: many prompts aren't known at all.
while low <= #text do
    high = math.min(high == 0 and 128 or high + 2048, #text)
    local names = {}
    for i = low, high, 8 do names[#names + 1] = row .. string.sub(text, i, i + 7) end
    low = high + 1
    for _, value in ipairs(call('MGET', unpack(names))) do
        value = value or ''
        if value == '' and not holes then return out end
        at = at + 1
        if value == last then
            out[#out - 1] = at
        else
            out[#out + 1] = at
            out[#out + 1] = value
            last = value
        end
    end
end
return out
""",
)

SWEEP = Script(
    "sweep",
    _EPOCH
    + _TIDY
    + """
-- epoch, most keys -> how many retired slots are left. Each gives back what its own keys take, and then its number.
local left = tonumber(ARGV[2])
while left > 0 do
    local slot = call('SRANDMEMBER', e .. ':retired')
    if not slot then break end
    local held = e .. ':p' .. slot
    local members = call('SPOP', held, math.min(left, 256))
    if #members == 0 then
        call('SREM', e .. ':retired', slot)
        call('SADD', e .. ':free', slot)
        left = left - 1
    else
        local names = {}
        for i, key in ipairs(members) do names[i] = e .. 'r' .. key end
        local more = paint(tonumber(slot), names, 0)
        if more ~= 0 then call('INCRBY', e .. ':rows', more) end
        left = left - #members
    end
end
return {'ok', call('SCARD', e .. ':retired')}
""",
)

ALL = (BEGIN, ACQUIRE, RENEW, RELEASE, DROP, WRITE, LOOKUP, STATE, SWEEP)
