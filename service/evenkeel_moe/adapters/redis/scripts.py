"""Lua scripts of the deployment store.

Every write but the decision log compares the writer's term with the highest term the store has
seen. Comments name the KEYS and ARGV of each script.
"""

# A stored term that is no term counts as none. Otherwise no lease could be taken any more; ranks
# that know a higher term say so.
_TERM_OF = """
local function term_of(text)
  local term = tonumber(text or '0')
  if term == nil or term ~= term or term < 0 or term >= 4503599627370496 then return 0 end
  return math.floor(term)
end
"""

# KEYS: lease, term, documents, plans, epochs, lease that was set aside. ARGV: holder, ttl in ms,
# term that the new one must exceed, record age in ms, age in ms of a deployment without records, 1
# if it is to be lasting, age in ms of what is set aside.
# A deployment has records when the ranks of its group were all here, or an operator set something.
# Answers holder, term, 1 if it is lasting, and what was wrong with the lease that was there. One
# without an end would keep the deployment from being led for ever.
ACQUIRE = (
    _TERM_OF
    + """
local lasting = ARGV[6] == '1' or redis.call('EXISTS', KEYS[4], KEYS[5]) > 0
local documents = redis.call('HLEN', KEYS[3])
lasting = (lasting or documents > redis.call('HEXISTS', KEYS[3], 'leader')) and 1 or 0
local held, wrong = redis.call('HMGET', KEYS[1], 'holder', 'term'), ''
if held[1] and held[2] and held[1] ~= ARGV[1] then
  if #held[1] <= 1024 and #held[2] <= 16 and string.match(held[2], '^%d+$') then
    if redis.call('PEXPIRE', KEYS[1], ARGV[2], 'NX') == 1 then wrong = 'it had no end' end
    return {held[1], held[2], lasting, wrong}
  end
  wrong = 'it has term ' .. string.sub(held[2], 1, 80)
    .. ' and a holder of ' .. #held[1] .. ' bytes'
  redis.call('RENAME', KEYS[1], KEYS[6])
  redis.call('PEXPIRE', KEYS[6], ARGV[7])
end
local term = math.max(term_of(redis.call('GET', KEYS[2])), tonumber(ARGV[3])) + 1
local text = string.format('%.0f', term)
redis.call('SET', KEYS[2], text)
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'term', text)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], lasting == 1 and ARGV[4] or ARGV[5])
return {ARGV[1], text, lasting, wrong}
"""
)

# KEYS: lease, then all records. ARGV: holder, term, ttl in ms, record age in ms.
# Records are kept while somebody leads, and expire some time after the last leader is gone.
RENEW = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'term')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
for record = 2, #KEYS do redis.call('PEXPIRE', KEYS[record], ARGV[4]) end
return 1
"""

# KEYS: deployments by the time they were last seen. ARGV: deployment, record age in s.
SEE = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('PEXPIRE', KEYS[1], ARGV[2] * 1000)
return 1
"""

# KEYS: lease, then what is deleted with it. ARGV: holder, term.
RELEASE = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'term')
if held[1] == ARGV[1] and held[2] == ARGV[2] then
  for _, key in ipairs(KEYS) do redis.call('DEL', key) end
end
return 1
"""

# Every fenced write begins with this. KEYS: term, last writes. ARGV: the writer's term, record,
# writer, number of the write; the last one is the record age in ms.
# A flushed store knows no term and takes over the writer's. A write may arrive after a later one of
# its own writer, on a connection the writer had closed. It is outdated and ignored.
_FENCE = (
    _TERM_OF
    + """
local known = term_of(redis.call('GET', KEYS[1]))
if known > tonumber(ARGV[1]) then return known end
if known < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
local writer, number = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', '^(%S+) (%d+)$')
if writer == ARGV[3] and tonumber(number) > tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3] .. ' ' .. ARGV[4])
"""
)

# Every fenced write ends with this. Records expire from the first write on, because a deployment
# may never be led long enough to be renewed.
_KEEP = """
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[#ARGV]) end
return 0
"""

# KEYS from 3: plans, maps, stories, order, open. ARGV from 5: plan id, created at, record, plans
# kept, 1 if the plan has not ended, prefix of the record names of plans, maps or nothing if the
# store has them, bytes of the stored story that stay, bytes that follow them; the last one is the
# record age in ms.
# Answers -1, and writes nothing, if maps or bytes are missing that the writer takes as stored.
# Plans that have not ended are not dropped. At most 1000 plans are dropped at a time, so that no
# number of them stops the store.
STORE_PLAN = (
    _FENCE
    + """
local id, stays = ARGV[5], tonumber(ARGV[12])
local story = redis.call('HGET', KEYS[5], id) or ''
if ARGV[11] ~= '' then
  redis.call('HSET', KEYS[4], id, ARGV[11])
elseif redis.call('HEXISTS', KEYS[4], id) == 0 or #story < stays then
  return -1
end
redis.call('HSET', KEYS[5], id, string.sub(story, 1, stays) .. ARGV[13])
redis.call('HSET', KEYS[3], id, ARGV[7])
redis.call('ZADD', KEYS[6], ARGV[6], id)
if ARGV[9] == '1' then
  redis.call('HSET', KEYS[7], id, 1)
else
  redis.call('HDEL', KEYS[7], id)
end
local excess = math.min(redis.call('ZCARD', KEYS[6]) - tonumber(ARGV[8]), 1000)
if excess > 0 then
  local oldest = redis.call('ZRANGE', KEYS[6], 0, excess + redis.call('HLEN', KEYS[7]) - 1)
  for _, old in ipairs(oldest) do
    if excess > 0 and redis.call('HEXISTS', KEYS[7], old) == 0 then
      excess = excess - 1
      for part = 3, 5 do redis.call('HDEL', KEYS[part], old) end
      redis.call('ZREM', KEYS[6], old)
      redis.call('HDEL', KEYS[2], ARGV[10] .. old)
    end
  end
end
"""
    + _KEEP
)

# KEYS from 3: epochs, replaced epochs. ARGV from 5: epoch, body, epochs kept, 1 if a history
# begins. Epochs above the written one belong to another history, and so do all if one begins. They
# become replaced ones. A write may be repeated.
STORE_EPOCH = (
    _FENCE
    + """
local written, kept = tonumber(ARGV[5]), tonumber(ARGV[7])
local replaced = {}
for _, epoch in ipairs(redis.call('HKEYS', KEYS[3])) do
  local known = tonumber(epoch)
  if known and (known > written or ARGV[8] == '1') then
    table.insert(replaced, epoch)
  elseif known and known <= written - kept then
    redis.call('HDEL', KEYS[3], epoch)
  end
end
table.sort(replaced, function(one, other) return tonumber(one) < tonumber(other) end)
for _, epoch in ipairs(replaced) do
  local body = redis.call('HGET', KEYS[3], epoch)
  if tonumber(epoch) ~= written or body ~= ARGV[6] then
    redis.call('LREM', KEYS[4], 0, epoch .. ' ' .. body)
    redis.call('LPUSH', KEYS[4], epoch .. ' ' .. body)
  end
  redis.call('HDEL', KEYS[3], epoch)
end
redis.call('LTRIM', KEYS[4], 0, kept - 1)
redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
"""
    + _KEEP
)

# KEYS from 3: documents. ARGV from 5: name, body.
STORE_DOCUMENT = (
    _FENCE
    + """
redis.call('HSET', KEYS[3], ARGV[5], ARGV[6])
"""
    + _KEEP
)

# KEYS: a key that nobody reads. The probe writes, because a store that refuses writes still answers
# reads, and because WAIT counts the replicas that have what its connection wrote.
PROBE = """
redis.call('SET', KEYS[1], 1, 'PX', 60000)
return 0
"""

# KEYS: a key that chooses the node of a Cluster.
TIME = "return redis.call('TIME')"

# KEYS: decisions. ARGV: body, rows kept, age of rows in ms. The answer to the first write of the
# newest row may have been lost.
APPEND_DECISION = """
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if newest and newest[2][2] == ARGV[1] then return 0 end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'd', ARGV[1])
local now = redis.call('TIME')
local oldest = tonumber(now[1]) * 1000 - tonumber(ARGV[3])
if oldest > 0 then redis.call('XTRIM', KEYS[1], 'MINID', '~', string.format('%.0f', oldest)) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""

# KEYS: plans, maps, stories. ARGV: plan ids. Answers record, maps and story of each. What is
# missing is nil.
READ_PLANS = """
local found = {}
for i, id in ipairs(ARGV) do
  found[i] = {}
  for part, key in ipairs(KEYS) do found[i][part] = redis.call('HGET', key, id) end
end
return found
"""
