local call, k = redis.call, KEYS[1]
local gateway, number, identity, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local known = call('HGET', k, 'identity')
if not known then
    call('HSET', k, 'identity', identity)
elseif known ~= identity then
    return {'identity', known}
end
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, name in ipairs(call('ZRANGEBYSCORE', k .. ':until', '-inf', now)) do
    call('HDEL', k .. ':who', name)
    call('ZREM', k .. ':until', name)
end
local word = 'ok'
local last = ARGV[5]
if call('HGET', k .. ':who', gateway) ~= number then
    word, number = 'joined', call('HINCRBY', k, 'next', 1)
    call('HSET', k .. ':who', gateway, number)
    local newest = call('XREVRANGE', k .. ':log', '+', '-', 'COUNT', 1)
    last = newest[1] and newest[1][1] or '0-0'
end
call('ZADD', k .. ':until', string.format('%.0f', now + lease), gateway)
local heard, seen = {}, 0
if word == 'ok' then
    if ARGV[7] ~= '' then
        local oldest = string.format('%.0f', now - 2 * lease)
        call('XADD', k .. ':log', 'MINID', '~', oldest, '*', 'g', gateway, 'n', number, 'd', ARGV[7])
    end
    for _, entry in ipairs(call('XRANGE', k .. ':log', '(' .. last, '+', 'COUNT', ARGV[6])) do
        last, seen = entry[1], seen + 1
        local fields = entry[2]
        if fields[2] ~= gateway then
            heard[#heard + 1] = {fields[2], fields[4], fields[6]}
        end
    end
end
for _, name in ipairs({'', ':who', ':until', ':log'}) do
    call('PEXPIRE', k .. name, 20 * lease)
end
return {word, tostring(number), last, call('HGETALL', k .. ':who'), heard, seen}
