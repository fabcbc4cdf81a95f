/** A minetest world that builds itself, for tests with the server. */

/**
 * A mod that builds without a player: each step it sets a block and counts in the mod's storage. At its start it
 * prints the count that the world remembers, and it looks whether the block of that count is there.
 */
export const MOD = `
local storage = minetest.get_mod_storage()
local count = storage:get_int("count")
minetest.log("action", "[builder] remembers " .. count)
minetest.set_mapgen_setting("mg_name", "singlenode", true)
minetest.register_node("builder:stone", { description = "stone" })
minetest.register_on_mods_loaded(function()
  minetest.after(0, function()
    for x = 0, 3 do for z = 0, 3 do minetest.forceload_block({ x = x * 16, y = 0, z = z * 16 }, true) end end
    minetest.emerge_area({ x = 0, y = 0, z = 0 }, { x = 63, y = 15, z = 63 }, function(_, _, left)
      if left > 0 then return end
      if count > 0 then
        local stones = 0
        for x = 0, 63 do for z = 0, 63 do
          if minetest.get_node({ x = x, y = 5, z = z }).name == "builder:stone" then stones = stones + 1 end
        end end
        minetest.log("action", "[builder] finds " .. stones)
      end
      local function build()
        count = count + 1
        minetest.set_node({ x = count % 64, y = 5, z = math.floor(count / 64) % 64 }, { name = "builder:stone" })
        storage:set_int("count", count)
        if count % 10 == 0 then minetest.log("action", "[builder] built " .. count) end
        minetest.after(0.02, build)
      end
      build()
    end)
  end)
end)
`;

/** world.mt: all that the server keeps is in SQLite. */
export const WORLD =
  'gameid = minetest\nbackend = sqlite3\nplayer_backend = sqlite3\nauth_backend = sqlite3\nmod_storage_backend = sqlite3\n';

/** Databases of such a world. */
export const DATABASES = ['map.sqlite', 'mod_storage.sqlite', 'auth.sqlite'];

/** The last number that the mod told: `built`, `remembers` or `finds`; 0 when it told none. */
export const told = (output: string, what: string): number =>
  Number([...output.matchAll(new RegExp(`\\[builder\\] ${what} (\\d+)`, 'g'))].at(-1)?.[1] ?? 0);
