-- epoch, then owner and token in turn: the leases end, and rows without a lease earn nothing.
for i = 2, #ARGV, 2 do
    if call('HGET', e .. ':fence', ARGV[i]) == ARGV[i + 1] then call('DEL', e .. ':lease:' .. ARGV[i]) end
end
return {'ok'}
