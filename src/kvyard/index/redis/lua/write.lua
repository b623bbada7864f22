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
