local call = redis.call
if call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return {'epoch'} end
local e = 'kvy:' .. ARGV[1]
