"""The script with which Redis changes a history, atomically and in one round trip."""

from __future__ import annotations

from recserve.bounds import MIN_TIME_US
from recserve.features.history.history import EVENT_DTYPE, HEADER

# ARGV[1] is the cap. Each further argument is one run of changes: one of the letters above, then
# either distinct new records in order of time, or the record of one correction. A removal uses only
# the event_key of its record, and an expiry only the time.
# Returns "0" or "1" per record. If more was done than adding at the end, the script returns that
# string together with the old value.
# Record layout: item_key 1-8, event_key 9-16, time 17-24, value 25-28, type 29 (EVENT_DTYPE).
APPEND = """
local SIZE, HEAD = 29, 16
local function checksum(head, body)
  local digest = redis.sha1hex(head .. body)
  return (string.sub(digest, 1, 16):gsub('..', function(hex) return string.char(tonumber(hex, 16))
  end))
end
local stored = redis.pcall('GET', KEYS[1])
if type(stored) == 'table' then return redis.error_reply('RECSERVE_CORRUPT not a string') end
local body = ''
if stored then
  body = string.sub(stored, HEAD + 1)
  local head = string.sub(stored, 1, 8)
  if #stored < HEAD or string.sub(head, 1, 4) ~= 'RH\\1\\1'
      or struct.unpack('<I4', head, 5) * SIZE ~= #body
      or checksum(head, body) ~= string.sub(stored, 9, HEAD) then
    return redis.error_reply('RECSERVE_CORRUPT checksum')
  end
end
local function time_at(text, start) return struct.unpack('<i8', text, start + 16) end
local function find(key)
  local from = 1
  while true do
    local at = string.find(body, key, from, true)
    if not at then return nil end
    if (at - 9) % SIZE == 0 then return (at - 9) / SIZE end
    from = at + 1
  end
end
local function place(time, high)
  local low = 0
  if high > 0 and time_at(body, (high - 1) * SIZE + 1) <= time then low = high end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if time_at(body, middle * SIZE + 1) <= time then low = middle + 1 else high = middle end
  end
  return low
end
local flags, changed, revised = {}, false, false
local function add(new)
  local fresh = {}
  for start = 1, #new, SIZE do
    local accepted = not find(string.sub(new, start + 8, start + 15))
    flags[#flags + 1] = accepted and '1' or '0'
    if accepted then fresh[#fresh + 1] = string.sub(new, start, start + SIZE - 1) end
  end
  if #fresh == 0 then return end
  local parts, left = {}, #body / SIZE
  for index = #fresh, 1, -1 do
    local low = place(time_at(fresh[index], 1), left)
    table.insert(parts, 1, fresh[index] .. string.sub(body, low * SIZE + 1, left * SIZE))
    left = low
  end
  changed, revised = true, revised or left * SIZE < #body
  body = string.sub(body, 1, left * SIZE) .. table.concat(parts)
end
local function correct(kind, record)
  local index = find(string.sub(record, 9, 16))
  flags[#flags + 1] = index and '1' or '0'
  if not index then return end
  changed, revised = true, true
  local time = string.sub(body, index * SIZE + 17, index * SIZE + 24)
  body = string.sub(body, 1, index * SIZE) .. string.sub(body, (index + 1) * SIZE + 1)
  if kind == '-' then return end
  if kind == '~' then record = string.sub(record, 1, 16) .. time .. string.sub(record, 25) end
  if string.sub(record, 17, 24) ~= time then index = place(time_at(record, 1), #body / SIZE) end
  body = string.sub(body, 1, index * SIZE) .. record .. string.sub(body, index * SIZE + 1)
end
local function expire(record)
  local dated = place(1e12 - 1, #body / SIZE)
  local kept = place(time_at(record, 1) - 1, #body / SIZE)
  flags[#flags + 1] = kept > dated and '1' or '0'
  if kept <= dated then return end
  changed, revised = true, true
  body = string.sub(body, 1, dated * SIZE) .. string.sub(body, kept * SIZE + 1)
end
for number = 2, #ARGV do
  local kind, run = string.sub(ARGV[number], 1, 1), string.sub(ARGV[number], 2)
  if kind == '+' then add(run) elseif kind == '<' then expire(run) else correct(kind, run) end
end
if changed and #body == 0 then
  redis.call('DEL', KEYS[1])
elseif changed then
  local cap = tonumber(ARGV[1])
  if #body > 2 * cap * SIZE then
    body = string.sub(body, -cap * SIZE)
    revised = stored ~= false
  end
  local head = 'RH\\1\\1' .. struct.pack('<I4', #body / SIZE)
  redis.call('SET', KEYS[1], head .. checksum(head, body) .. body)
end
if revised then return {table.concat(flags), stored} end
return table.concat(flags)
"""
SIZES = (HEADER.size, EVENT_DTYPE.itemsize, MIN_TIME_US)
assert SIZES == (16, 29, 10**12), "the script hard-codes these numbers"
