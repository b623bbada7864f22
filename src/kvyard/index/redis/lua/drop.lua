-- epoch, owner, token: the owner is gone for good. Without a token only if its lease is free.
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
