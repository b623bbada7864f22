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
