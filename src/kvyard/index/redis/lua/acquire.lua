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
