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
