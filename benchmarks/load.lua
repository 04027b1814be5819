-- Closed loop for wrk: an exact number of POST requests, a mark on stdout at equal distances, then silence.
-- Arguments: body file, warm-up requests, timed requests, marks, least and greatest length of an answer.

local warm, last, step, least, greatest
local sent, got = 0, 0

function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
  wrk.body = file:read("*a")
  file:close()
  warm = tonumber(args[2])
  step = tonumber(args[3]) / tonumber(args[4])
  last = warm + tonumber(args[3])
  least, greatest = tonumber(args[5]), tonumber(args[6])
end

-- Called before every request. After the last one connections stay open and idle, so that no request is cut off.
function delay()
  if sent >= last then return 3600000 end
  sent = sent + 1
  return 0
end

function response(status, headers, body)
  if status ~= 200 or #body < least or #body > greatest then
    io.write(string.format("wrong status %d, %d bytes: %s\n", status, #body, body:sub(1, 200):gsub("\n", " ")))
    io.flush()
  end
  got = got + 1
  if got >= warm and (got - warm) % step == 0 then
    io.write(string.format("mark %d\n", got))
    io.flush()
  end
end
