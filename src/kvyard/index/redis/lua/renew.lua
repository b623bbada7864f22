-- epoch, replica, milliseconds, then owner and token in turn -> the owners that were lost.
local lost = {'ok'}
for i = 4, #ARGV, 2 do
    if call('HGET', e .. ':fence', ARGV[i]) == ARGV[i + 1] then
        call('SET', e .. ':lease:' .. ARGV[i], ARGV[2], 'PX', ARGV[3])
    else
        lost[#lost + 1] = ARGV[i]
    end
end
return lost
