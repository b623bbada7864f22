-- run, a new epoch's name, identity -> epoch, identity. Another run of the server, or none known: all before is void.
local known = redis.call('HMGET', KEYS[1], 'run', 'epoch', 'identity')
if known[1] == ARGV[1] and known[2] then return {known[2], known[3] or ''} end
if known[2] then redis.call('SADD', KEYS[1] .. ':void', known[2]) end
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'epoch', ARGV[2], 'identity', ARGV[3])
return {ARGV[2], ARGV[3]}
