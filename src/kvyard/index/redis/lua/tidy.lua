-- Sets or clears a slot's bit in the rows of some keys; returns how many rows there are more. Whole chunks take three calls,
-- since a call costs more than all that Lua does here, and neighbours mostly have equal rows, so each is worked out once.
local function paint(slot, names, value)
    local byte, mask = math.floor(slot / 8) + 1, 2 ^ (7 - slot % 8)
    local known, pairs_, dead, more = {}, {}, {}, 0
    for i, old in ipairs(call('MGET', unpack(names))) do
        old = old or ''
        local new = known[old]
        if not new then
            local padded = old .. string.rep('\0', byte - #old)
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
