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
