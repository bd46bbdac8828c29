// What moves bytes, and what serves clocks and checks: the module "move".
#include "broadcast.h"
#include "staged.h"
#include "ll12_move.h"
#include "ll_move.h"
#include "mark.h"
#include "p2p.h"
#include "probe.h"
