// What moves bytes, and what serves clocks and checks: the module "move". Of "move_peers",
// which stamps by peer, only what moves bytes of collectives.
#include "broadcast.h"
#include "ring.h"
#ifndef LS_PEERS
#include "staged.h"
#endif
#include "chain_move.h"
#include "ll12_move.h"
#include "ll_move.h"
#ifndef LS_PEERS
#include "mark.h"
#include "p2p.h"
#include "probe.h"
#endif
