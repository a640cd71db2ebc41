-- The rules of the contract on the keys of one budget tree: carries out a list of operations in their order.
--
-- KEYS   1 epoch  2 leases  3 ended  4 mark  5… the ids and then the buckets that the operations name
-- ARGV   1 a flat JSON array, as stores/_redis_wire.py writes it
--
-- All keys of a tree begin with the same {hash tag}, so that holds whose lease is over, which nobody can name in KEYS, lie in
-- the same slot:
--   …:e          hash    id, n, accepted, suspect, t: the epoch, and the store's time, which never runs backwards
--   …:l  …:x     zset    held ids and expired ids, by the end of their lease
--   …:c:<client> string  n of this client's last write
--   …:b:<name>   hash    h held, s spent, l lost, c credited, m "starts ends [tree,name]"; without a time to live while it holds
--   …:i:<id>     string  "option,step,charge_at_end,ended name amount line limit name …"; of a closed id only when it closed
--
-- Every key is read, and every answer found, before the first write: a script that fails keeps what it wrote. Lua counts in
-- doubles, so sums are written by HINCRBY, and what is past 2^53 is answered as text.

local RETENTION, RETENTION_WINDOWLESS, AHEAD, MARK = 86400000, 2592000000, 60000, 604800000
local GRACE = 60000 -- a bucket outlives the records that may still change it
local IDLE = 86400000 -- and the epoch its buckets
local SWEEP = 100 -- leases ended in one run: about 2 ms of the server's time when each holds five buckets
local EXACT = 9007199254740992 -- 2^53
local ROOM = 2305843009213693952 -- 2^61: whatever moves between the four sums of a bucket, none overflows 2^63
local HELD, SPENT, LOST, CREDITED = 1, 2, 3, 4
local FIELDS = {"h", "s", "l", "c"}

local call, format, sub, match, gmatch = redis.call, string.format, string.sub, string.match, string.gmatch
local tonumber, type, min, max = tonumber, type, math.min, math.max
local KEYS, ask = KEYS, cjson.decode(ARGV[1])
local epoch_key, leases_key, ended_key, mark_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local prefix = sub(epoch_key, 1, -2)
local fresh, known, seen, known_accepted, acked, moment, ids, buckets =
  ask[1], ask[2], ask[3], ask[4], ask[5], ask[6], ask[7], ask[8]

local function digits(number)
  return format("%.0f", number)
end

local function whole(text, key)
  if not text then
    return 0
  end
  if not match(text, "^%-?%d+$") then
    error("key " .. key .. " holds something else than a number of ours")
  end
  return tonumber(text)
end

-- The epoch, and whether this client saw more than is here.

local epoch = call("HMGET", epoch_key, "id", "n", "accepted", "suspect", "t")
local n, accepted, suspect = whole(epoch[2], epoch_key), whole(epoch[3], epoch_key), whole(epoch[4], epoch_key)
local now = whole(epoch[5], epoch_key)
local id = epoch[1] or fresh
if not moment then
  local time = call("TIME")
  moment = time[1] * 1000 + math.floor(time[2] / 1000)
end
if moment > now then
  now = moment
end
local mark = whole(call("GET", mark_key), mark_key)
-- Had somebody accepted since this client's last call, what it knew would be void.
if known and accepted <= known_accepted and (id ~= known or n < seen or mark < acked) then
  suspect = 1
end

-- Buckets. b[1…4] are the sums now, and b.read what they were. A bucket with a sum that is, or was in this run, below 0 or
-- above 2^53 has in b.parts, per sum, the text of what was read and of every amount since: what is written of it is exact, and
-- so is its sum as soon as that is small again.

local books, by_name = {}, {}

local function part(b)
  b.parts = {}
  for f = 1, 4 do
    b.parts[f] = {b.text[f]}
    if b[f] ~= b.read[f] then
      b.parts[f][2] = digits(b[f] - b.read[f])
    end
  end
end

local function bucket(key)
  local b = books[key]
  if not b then
    local got = call("HMGET", key, "h", "s", "l", "c", "m")
    b = {text = {}, read = {}, meta = got[5], kept = got[5], found = got[5] or got[1] or got[2]}
    for f = 1, 4 do
      b.text[f], b.read[f] = got[f] or "0", whole(got[f], key)
      b[f] = b.read[f]
    end
    for f = 1, 4 do
      if b[f] < 0 or b[f] >= EXACT then
        part(b)
      end
    end
    books[key] = b
  end
  return b
end

local function named_bucket(name)
  local b = by_name[name]
  if not b then
    b = bucket(prefix .. "b:" .. name)
    by_name[name] = b
  end
  return b
end

local function add(b, f, amount)
  local sum = b[f] + amount
  b.dirty = true
  if b.parts or sum < 0 or sum >= EXACT then
    if not b.parts then
      part(b)
    end
    local parts, high, low = b.parts[f], 0, 0
    parts[#parts + 1] = digits(amount)
    for _, number in ipairs(parts) do
      local minus, figures = match(number, "^(%-?)(%d+)$")
      local sign = minus == "-" and -1 or 1
      high = high + sign * (tonumber(sub(figures, 1, -10)) or 0)
      low = low + sign * tonumber(sub(figures, -9))
    end
    sum = high * 1000000000 + low
  end
  b[f] = sum
end

local function has_room(b, amount)
  return b[HELD] + b[SPENT] + b[LOST] + b[CREDITED] + amount < ROOM
end

local function fits(b, growth, bound)
  -- Past 2^53 a sum is rounded by less than it is above any bound, which is at most 2^52: it is refused all the same.
  return growth <= 0 or ((not bound or b[HELD] + b[SPENT] + growth <= bound) and has_room(b, growth))
end

local function put_sums(answer, at, b)
  if b.parts then
    for f = 1, 4 do
      answer[at + f - 1] = table.concat(b.parts[f], "+")
    end
  else
    answer[at], answer[at + 1], answer[at + 2], answer[at + 3] = b[1], b[2], b[3], b[4]
  end
  return answer
end

-- Ids. A record is false (absent), a number (when it closed), a table (held or expired), or text that was not needed yet.

local records, changed = {}, {}
local leases, ended = {}, {} -- id → when its lease ends, or false to take it out
local first_end -- no lease ends before this

local function id_of(key)
  return sub(key, -32)
end

-- An id begins with the moment of its making, in 12 hex digits.
local oldest = format("%012x", max(now - RETENTION, 0))

local function is_old(key)
  return id_of(key) < oldest
end

local function load(keys, from, to)
  for at = from, to, 1000 do
    for i, text in ipairs(call("MGET", unpack(keys, at, min(at + 999, to)))) do
      local key = keys[at + i - 1]
      if records[key] == nil then -- else the sweep has changed it by now
        records[key] = text
      end
    end
  end
end

local function put(key, record)
  records[key] = record
  changed[key] = true
end

local function lookup(key)
  local record = records[key]
  if type(record) ~= "string" then
    return record
  end
  local option, step, charge, over = match(record, "^(%d+),(%d+),(%d),(%d+)")
  local since
  if option then
    record = {option = tonumber(option), step = tonumber(step), charge = charge == "1", ended = tonumber(over), charges = record}
    since = record.ended
  else
    record = whole(record, key)
    since = record
  end
  -- An id made by a clock ahead of ours stays until it is old by its own moment: forgotten before, it could count twice.
  if since > 0 and since + RETENTION < now and is_old(key) then
    if option then
      ended[id_of(key)] = false
    end
    put(key, false)
    return false
  end
  records[key] = record
  return record
end

local function text(record)
  local charges = match(record.charges, "^%S*(.*)$") -- what was read still has its first word
  return record.option .. "," .. digits(record.step) .. "," .. (record.charge and 1 or 0) .. "," .. digits(record.ended) .. charges
end

-- The names and the amounts of a record, as two lists.
local function parts_of(record)
  if record.parsed ~= record.charges then
    local names, amounts, size = {}, {}, 0
    for name, amount in gmatch(record.charges, " (%S+) (%d+) %S+ %S+") do
      size = size + 1
      names[size], amounts[size] = name, tonumber(amount)
    end
    record.parsed, record.names, record.amounts = record.charges, names, amounts
  end
  return record.names, record.amounts
end

local function take(record, sign)
  local names, amounts = parts_of(record)
  for i = 1, #names do
    add(named_bucket(names[i]), HELD, sign * amounts[i])
  end
end

local ends_of = {} -- length of a lease → when one that starts now ends, as text

local function start_lease(key, lease)
  local ends = ends_of[lease]
  if not ends then
    ends = digits(now + lease)
    ends_of[lease] = ends
    first_end = min(first_end or now + lease, now + lease)
  end
  leases[id_of(key)] = ends
end

local function end_lease(key, record, ends)
  take(record, -1)
  local names, amounts = parts_of(record)
  for i = 1, #names do
    local b = named_bucket(names[i])
    add(b, LOST, amounts[i])
    if record.charge then
      add(b, SPENT, amounts[i])
    end
  end
  record.ended = now
  leases[id_of(key)] = false
  ended[id_of(key)] = digits(ends)
  changed[key] = true
end

local function undo_end(key, record)
  local names, amounts = parts_of(record)
  for i = 1, #names do
    local b = named_bucket(names[i])
    if b.found then
      add(b, LOST, -amounts[i])
      if record.charge then
        add(b, SPENT, -amounts[i])
      end
    end
  end
  ended[id_of(key)] = false
end

-- Write everything; nothing here can fail but its first command (a full, read-only or unsaved server), which changes nothing.

local function write_zset(key, members)
  local put_in, ins, take_out, outs = {}, 0, {}, 0
  for member, score in pairs(members) do
    if score then
      put_in[ins + 1], put_in[ins + 2] = score, member
      ins = ins + 2
    else
      outs = outs + 1
      take_out[outs] = member
    end
  end
  for at = 1, ins, 1000 do
    call("ZADD", key, unpack(put_in, at, min(at + 999, ins)))
  end
  for at = 1, outs, 1000 do
    call("ZREM", key, unpack(take_out, at, min(at + 999, outs)))
  end
  return ins > 0
end

local longest = RETENTION_WINDOWLESS -- for how long a bucket is kept at most

local function write_bucket(key, b)
  if b.meta and not b.kept then
    call("HSET", key, "m", b.meta)
  end
  for f = 1, 4 do
    if b.parts then
      for i = 2, #b.parts[f] do
        call("HINCRBY", key, FIELDS[f], b.parts[f][i])
      end
    elseif b[f] ~= b.read[f] then
      call("HINCRBY", key, FIELDS[f], digits(b[f] - b.read[f]))
    end
  end
  if b[HELD] ~= 0 then
    if b.found and b.read[HELD] == 0 then
      call("PERSIST", key)
    end
    return
  end
  local ends = b.ends
  if ends == nil and b.meta then
    ends = tonumber(match(b.meta, "^%S+ (%d+)"))
  end
  -- A length of time and no moment: the server's clock need not be the store's.
  local keep = ends and max(ends - now, 0) + RETENTION + GRACE or RETENTION_WINDOWLESS
  longest = max(longest, keep)
  call("PEXPIRE", key, digits(keep))
end

local written = false

local function write()
  if written then
    return
  end
  written = true
  n = n + 1
  call("HSET", epoch_key, "id", id, "n", digits(n), "accepted", digits(accepted), "suspect", suspect, "t", digits(now))
  call("SET", mark_key, digits(n), "PX", MARK)
  for key, b in pairs(books) do
    if b.dirty then
      write_bucket(key, b)
    end
  end
  if epoch[1] then
    call("PEXPIRE", epoch_key, digits(longest + IDLE), "GT") -- a tree that nobody uses any more leaves nothing behind
  else
    call("PEXPIRE", epoch_key, digits(longest + IDLE))
  end
  local held, size = {}, 0
  local this_moment, now_text, keep_text = format("%012x", now), digits(now), digits(RETENTION + 1)
  for key in pairs(changed) do
    local record = records[key]
    if not record then
      call("DEL", key)
    elseif type(record) == "string" or (type(record) == "table" and record.ended == 0) then
      held[size + 1], held[size + 2] = key, type(record) == "string" and record or text(record)
      size = size + 2
    else
      local keep, made = keep_text, sub(key, -32, -21)
      if made > this_moment then
        keep = digits(tonumber(made, 16) - now + RETENTION + 1)
      end
      call("SET", key, type(record) == "table" and text(record) or now_text, "PX", keep)
    end
  end
  for at = 1, size, 1000 do
    call("MSET", unpack(held, at, min(at + 999, size)))
  end
  write_zset(leases_key, leases)
  if write_zset(ended_key, ended) then
    call("PEXPIRE", ended_key, digits(RETENTION + GRACE))
  end
end

-- End the leases whose time has come. Answers whether there may be more of them than one run should end.

local function keys_of(members)
  local keys = {}
  for i = 1, #members, 2 do
    keys[#keys + 1] = prefix .. "i:" .. members[i]
  end
  return keys
end

local function forget_ended(most)
  local members = call("ZRANGE", ended_key, 0, most - 1, "WITHSCORES")
  local keys = keys_of(members)
  for i, key in ipairs(keys) do
    -- They ended in the order of their leases' ends: the first that is kept stands before all that are.
    if tonumber(members[2 * i]) + RETENTION >= now then
      return
    end
    load(keys, i, i)
    if lookup(key) then
      return
    end
    ended[id_of(key)] = false
  end
end

local function sweep()
  local first = call("ZRANGE", leases_key, 0, 0, "WITHSCORES")
  first_end = tonumber(first[2])
  if not first_end or first_end > now then
    return false
  end
  local members = call("ZRANGEBYSCORE", leases_key, "-inf", digits(now), "WITHSCORES", "LIMIT", 0, SWEEP)
  local keys = keys_of(members)
  load(keys, 1, #keys)
  for i, key in ipairs(keys) do
    local record = lookup(key)
    if type(record) == "table" and record.ended == 0 then
      end_lease(key, record, tonumber(members[2 * i]))
    else
      leases[id_of(key)] = false
    end
  end
  forget_ended(#keys + 10)
  local rest = call("ZRANGE", leases_key, #keys, #keys, "WITHSCORES")
  first_end = tonumber(rest[2])
  return first_end ~= nil and first_end <= now
end

-- Answers. What nearly every operation answers is numbers, and those of a whole run travel as one string of eight bytes each:
-- as values of their own they would take the server as long as all the rest. Any other answer is a table, and a 0 among the
-- numbers stands for it.

local OTHER, GRANTED, SETTLED = 0, 1, 2
local numbers, size, others = {}, 0, {}

-- Appends the sums of a bucket. Answers whether it could: parts are no number.
local function number_sums(b)
  if b.parts then
    return false
  end
  numbers[size + 1], numbers[size + 2], numbers[size + 3], numbers[size + 4] = b[1], b[2], b[3], b[4]
  size = size + 4
  return true
end

local function packed()
  local strings = {}
  for at = 1, size, 1000 do
    local last = min(at + 999, size)
    strings[#strings + 1] = struct.pack(">" .. string.rep("i8", last - at + 1), unpack(numbers, at, last))
  end
  return table.concat(strings)
end

-- The operations. `at` is where one's values begin; faces are the buckets as this call names them. Each returns its answer,
-- or nothing when it has put that among the numbers.

local faces, names, starts_too_far, over_since = {}, {}, {}, {}

local function put_record_sums(answer, record)
  for _, name in ipairs((parts_of(record))) do
    local b = named_bucket(name)
    answer[#answer + 1] = b.meta or name
    put_sums(answer, #answer + 1, b)
  end
  return answer
end

local function put_face_sums(answer, from, last, step)
  for i = from, last, step do
    put_sums(answer, #answer + 1, faces[ask[i]])
  end
  return answer
end

local function settled(counted, late, from, last)
  local before, all = size, true
  numbers[size + 1], numbers[size + 2], numbers[size + 3] = SETTLED, counted, late
  size = size + 3
  for i = from, last, 2 do
    all = number_sums(faces[ask[i]]) and all
  end
  if all then
    return
  end
  size = before
  return put_face_sums({"settled", counted, late}, from, last, 2)
end

local function reserve(at)
  local key, lease, options = KEYS[ask[at]], ask[at + 1], ask[at + 2]
  if suspect ~= 0 then
    return {"rolled back"}
  end
  local record = lookup(key)
  if record then
    if type(record) == "table" and record.ended == 0 then
      return put_record_sums({"again", record.option}, record)
    end
    return {"gone"}
  end
  if is_old(key) then
    return {"gone"}
  end
  local refused
  at = at + 3
  for option = 0, options - 1 do
    local last = at + 2 + 3 * (ask[at] - 1)
    local found
    for i = at + 2, last, 3 do
      local face, amount = ask[i], ask[i + 1]
      if starts_too_far[face] or (over_since[face] and over_since[face] <= now) then
        return {"stale"}
      end
      if not fits(faces[face], amount, ask[i + 2]) then
        found = found or {}
        found[#found + 1] = put_sums({(i - at - 2) / 3}, 2, faces[face])
      end
    end
    if not found then
      local before, all = size, true
      numbers[size + 1], numbers[size + 2] = GRANTED, option
      size = size + 2
      for i = at + 2, last, 3 do
        local b = faces[ask[i]]
        add(b, HELD, ask[i + 1])
        all = number_sums(b) and all
      end
      put(key, ask[at + 1])
      start_lease(key, lease)
      if all then
        return
      end
      size = before
      return put_face_sums({"held", option}, at + 2, last, 3)
    end
    refused = refused or {"refused"}
    refused[#refused + 1] = found
    at = last + 3
  end
  return refused
end

local function extend(at)
  local key, step, size = KEYS[ask[at]], ask[at + 1], ask[at + 2]
  local record = lookup(key)
  if type(record) ~= "table" or record.ended ~= 0 then
    return {"gone"}
  end
  if step > record.step then
    local before, had, amounts = {}, parts_of(record)
    for i = 1, #had do
      before[had[i]] = amounts[i]
    end
    local found = {}
    for i = at + 4, at + 1 + 3 * size, 3 do
      local face = ask[i]
      if not fits(faces[face], ask[i + 1] - (before[names[face]] or 0), ask[i + 2]) then
        found[#found + 1] = put_sums({(i - at - 4) / 3}, 2, faces[face])
      end
    end
    if #found > 0 then
      return {"refused", found}
    end
    take(record, -1)
    record.step, record.charges = step, ask[at + 3]
    take(record, 1)
    changed[key] = true
  end
  return put_record_sums({"again", record.option}, record)
end

local function settle(at)
  local key, size = KEYS[ask[at]], ask[at + 1]
  local from, last = at + 2, at + 2 * size
  local record = lookup(key)
  if type(record) == "number" then
    return settled(0, 0, from, last)
  end
  local late = not record or record.ended ~= 0
  if late and size > 0 then
    if not record and is_old(key) then
      return {"id forgotten"}
    end
    for i = from, last, 2 do
      local ends = over_since[ask[i]]
      if ends and ends + RETENTION <= now then
        return {"window forgotten", (i - from) / 2}
      end
    end
  end
  local had = record and parts_of(record)
  local has
  for i = from, last, 2 do
    local name = names[ask[i]]
    if had and had[(i - from) / 2 + 1] ~= name then -- else it stands in its place, as nearly always
      if not has then
        has = {}
        for j = 1, #had do
          has[had[j]] = true
        end
      end
      if not has[name] then
        return {"not held", (i - from) / 2}
      end
    end
    if not has_room(faces[ask[i]], ask[i + 1]) then
      return {"no room", (i - from) / 2}
    end
  end
  if record and late then
    undo_end(key, record)
  elseif record then
    take(record, -1)
    leases[id_of(key)] = false
  end
  for i = from, last, 2 do
    add(faces[ask[i]], SPENT, ask[i + 1])
  end
  put(key, now)
  return settled(1, late and 1 or 0, from, last)
end

local function credit(at)
  local key, size = KEYS[ask[at]], ask[at + 1]
  local from, last = at + 2, at + 2 * size
  local record = lookup(key)
  if type(record) == "table" then
    return {"a reservation"}
  end
  if record then
    return settled(0, 0, from, last)
  end
  if is_old(key) then
    return {"id forgotten"}
  end
  for i = from, last, 2 do
    if ask[i + 1] > faces[ask[i]][SPENT] then
      return put_sums({"spent less", (i - from) / 2}, 3, faces[ask[i]])
    end
    if not has_room(faces[ask[i]], ask[i + 1]) then
      return {"no room", (i - from) / 2}
    end
  end
  for i = from, last, 2 do
    add(faces[ask[i]], SPENT, -ask[i + 1])
    add(faces[ask[i]], CREDITED, ask[i + 1])
  end
  put(key, now)
  return settled(1, 0, from, last)
end

local function take_again(key, record)
  for name, amount, limit in gmatch(record.charges, " (%S+) (%d+) %S+ (%S+)") do
    -- What the lease's end counted as spent is what is taken again: that fits by itself.
    local growth = record.charge and 0 or tonumber(amount)
    if not fits(named_bucket(name), growth, tonumber(limit)) then
      return false
    end
  end
  undo_end(key, record)
  take(record, 1)
  record.ended = 0
  changed[key] = true
  return true
end

local function renew(at)
  local lease, size = ask[at], ask[at + 1]
  local answer = {"renewed"}
  for i = at + 2, at + 1 + size do
    local key = KEYS[ask[i]]
    local record = lookup(key)
    if type(record) == "table" and (record.ended == 0 or take_again(key, record)) then
      start_lease(key, lease)
      answer[#answer + 1] = i - at - 2
    end
  end
  return answer
end

local function balances(at)
  return put_face_sums({"balances"}, at + 1, at + ask[at], 1)
end

-- Lists what is written, so it stands alone in its run: first what the sweep found is written.
local function holds(at)
  local most = ask[at]
  forget_ended(100)
  write()
  local answer = {"holds"}
  for _, zset in ipairs({ended_key, leases_key}) do
    local members = call("ZRANGE", zset, 0, most - 1, "WITHSCORES")
    local keys = keys_of(members)
    load(keys, 1, #keys)
    for i, key in ipairs(keys) do
      local record = lookup(key)
      if type(record) == "table" and #answer <= most then
        local metas = {}
        for j, name in ipairs((parts_of(record))) do
          metas[j] = named_bucket(name).meta or name
        end
        answer[#answer + 1] = {
          members[2 * i - 1], record.ended, tonumber(members[2 * i]), record.charge and 1 or 0, record.charges, metas,
        }
      end
    end
  end
  return answer
end

local function accept()
  id, suspect = fresh, 0
  -- Above whatever any client knows, or it would go on suspecting.
  accepted = max(now, accepted + 1, known_accepted + 1)
  return {"accepted"}
end

local function check()
  return {"checked"}
end

local OPERATIONS = {
  reserve = reserve, extend = extend, settle = settle, credit = credit, renew = renew, balances = balances, holds = holds,
  accept = accept, check = check,
}

-- The run.

local more = sweep()
if not more then
  load(KEYS, 5, 4 + ids)
  local at = 9
  for face = 1, buckets do
    local key, starts, ends = KEYS[4 + ids + face], ask[at], ask[at + 1]
    local b = bucket(key)
    b.meta = b.meta or ask[at + 2]
    b.ends = ends
    local name = sub(key, #prefix + 3)
    faces[face], names[face], by_name[name], over_since[face] = b, name, b, ends
    starts_too_far[face] = starts and starts > now + AHEAD
    at = at + 3
  end
  while at <= #ask do
    local answer = OPERATIONS[ask[at]](at + 2)
    if answer then
      size = size + 1
      numbers[size] = OTHER
      others[#others + 1] = answer
    end
    at = at + 2 + ask[at + 1]
  end
end
write()
return {id, n, accepted, suspect, now, first_end or -1, more and 1 or 0, packed(), others}
