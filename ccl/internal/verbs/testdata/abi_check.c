// Compiles where abi.h agrees with the installed libibverbs.
#include <infiniband/verbs.h>

#include "abi.h"

#define SIZE(s) _Static_assert(sizeof(struct vb_##s) == sizeof(struct ibv_##s), "size of " #s);
#define AT(s, m) \
	_Static_assert(offsetof(struct vb_##s, m) == offsetof(struct ibv_##s, m), "offset of " #s "." #m); \
	_Static_assert(sizeof(((struct vb_##s *)0)->m) == sizeof(((struct ibv_##s *)0)->m), "size of " #s "." #m);
#define VALUE(v) _Static_assert((int)VB_##v == (int)IBV_##v, #v);

VALUE(QPT_RC)
VALUE(QPS_RESET) VALUE(QPS_INIT) VALUE(QPS_RTR) VALUE(QPS_RTS) VALUE(QPS_SQD) VALUE(QPS_SQE) VALUE(QPS_ERR)
VALUE(PORT_DOWN) VALUE(PORT_ACTIVE)
VALUE(LINK_LAYER_INFINIBAND) VALUE(LINK_LAYER_ETHERNET)
VALUE(GID_TYPE_IB) VALUE(GID_TYPE_ROCE_V1) VALUE(GID_TYPE_ROCE_V2)
VALUE(WR_RDMA_WRITE) VALUE(WR_RDMA_WRITE_WITH_IMM)
VALUE(SEND_SIGNALED) VALUE(SEND_INLINE)
VALUE(ACCESS_LOCAL_WRITE) VALUE(ACCESS_REMOTE_WRITE) VALUE(ACCESS_REMOTE_READ) VALUE(ACCESS_REMOTE_ATOMIC) VALUE(ACCESS_RELAXED_ORDERING) VALUE(ACCESS_OPTIONAL_RANGE)
VALUE(WC_SUCCESS) VALUE(WC_LOC_PROT_ERR) VALUE(WC_WR_FLUSH_ERR) VALUE(WC_REM_ACCESS_ERR) VALUE(WC_RETRY_EXC_ERR) VALUE(WC_RNR_RETRY_EXC_ERR)
VALUE(WC_RDMA_WRITE) VALUE(WC_RECV) VALUE(WC_RECV_RDMA_WITH_IMM) VALUE(WC_WITH_IMM)
VALUE(EVENT_CQ_ERR) VALUE(EVENT_QP_FATAL) VALUE(EVENT_QP_REQ_ERR) VALUE(EVENT_QP_ACCESS_ERR) VALUE(EVENT_COMM_EST) VALUE(EVENT_SQ_DRAINED)
VALUE(EVENT_PATH_MIG) VALUE(EVENT_PATH_MIG_ERR) VALUE(EVENT_DEVICE_FATAL) VALUE(EVENT_PORT_ACTIVE) VALUE(EVENT_PORT_ERR) VALUE(EVENT_LID_CHANGE)
VALUE(EVENT_PKEY_CHANGE) VALUE(EVENT_SM_CHANGE) VALUE(EVENT_SRQ_ERR) VALUE(EVENT_SRQ_LIMIT_REACHED) VALUE(EVENT_QP_LAST_WQE_REACHED)
VALUE(EVENT_CLIENT_REREGISTER) VALUE(EVENT_GID_CHANGE)
VALUE(QP_STATE) VALUE(QP_ACCESS_FLAGS) VALUE(QP_PKEY_INDEX) VALUE(QP_PORT) VALUE(QP_AV) VALUE(QP_PATH_MTU) VALUE(QP_TIMEOUT) VALUE(QP_RETRY_CNT)
VALUE(QP_RNR_RETRY) VALUE(QP_RQ_PSN) VALUE(QP_MAX_QP_RD_ATOMIC) VALUE(QP_MIN_RNR_TIMER) VALUE(QP_SQ_PSN) VALUE(QP_MAX_DEST_RD_ATOMIC) VALUE(QP_DEST_QPN)

_Static_assert(sizeof(union vb_gid) == sizeof(union ibv_gid), "size of gid");
_Static_assert(_Alignof(union vb_gid) == _Alignof(union ibv_gid), "alignment of gid");

SIZE(gid_entry) AT(gid_entry, gid) AT(gid_entry, gid_index) AT(gid_entry, port_num) AT(gid_entry, gid_type) AT(gid_entry, ndev_ifindex)

SIZE(device_attr) AT(device_attr, fw_ver) AT(device_attr, node_guid) AT(device_attr, sys_image_guid) AT(device_attr, max_mr_size)
AT(device_attr, page_size_cap) AT(device_attr, vendor_id) AT(device_attr, vendor_part_id) AT(device_attr, hw_ver) AT(device_attr, max_qp)
AT(device_attr, max_qp_wr) AT(device_attr, device_cap_flags) AT(device_attr, max_sge) AT(device_attr, max_sge_rd) AT(device_attr, max_cq)
AT(device_attr, max_cqe) AT(device_attr, max_mr) AT(device_attr, max_pd) AT(device_attr, max_pkeys) AT(device_attr, local_ca_ack_delay)
AT(device_attr, phys_port_cnt)

// A newer header has active_speed_ex too, an older one ends before it.
_Static_assert(sizeof(struct vb_port_attr) >= sizeof(struct ibv_port_attr) || offsetof(struct ibv_port_attr, port_cap_flags2) == 48, "size of port_attr");
_Static_assert(sizeof(struct ibv_port_attr) >= offsetof(struct vb_port_attr, active_speed_ex), "size of port_attr");
AT(port_attr, state) AT(port_attr, max_mtu) AT(port_attr, active_mtu) AT(port_attr, gid_tbl_len) AT(port_attr, port_cap_flags) AT(port_attr, max_msg_sz)
AT(port_attr, bad_pkey_cntr) AT(port_attr, qkey_viol_cntr) AT(port_attr, pkey_tbl_len) AT(port_attr, lid) AT(port_attr, sm_lid) AT(port_attr, lmc)
AT(port_attr, max_vl_num) AT(port_attr, sm_sl) AT(port_attr, subnet_timeout) AT(port_attr, init_type_reply) AT(port_attr, active_width)
AT(port_attr, active_speed) AT(port_attr, phys_state) AT(port_attr, link_layer) AT(port_attr, flags) AT(port_attr, port_cap_flags2)

SIZE(wc) AT(wc, wr_id) AT(wc, status) AT(wc, opcode) AT(wc, vendor_err) AT(wc, byte_len) AT(wc, imm_data) AT(wc, qp_num) AT(wc, src_qp)
AT(wc, wc_flags) AT(wc, pkey_index) AT(wc, slid) AT(wc, sl) AT(wc, dlid_path_bits)

SIZE(sge) AT(sge, addr) AT(sge, length) AT(sge, lkey)

SIZE(send_wr) AT(send_wr, wr_id) AT(send_wr, next) AT(send_wr, sg_list) AT(send_wr, num_sge) AT(send_wr, opcode) AT(send_wr, send_flags) AT(send_wr, imm_data)
_Static_assert(offsetof(struct vb_send_wr, rdma) == offsetof(struct ibv_send_wr, wr.rdma), "offset of send_wr.wr.rdma");
_Static_assert(offsetof(struct vb_send_wr, rdma.remote_addr) == offsetof(struct ibv_send_wr, wr.rdma.remote_addr), "offset of remote_addr");
_Static_assert(offsetof(struct vb_send_wr, rdma.rkey) == offsetof(struct ibv_send_wr, wr.rdma.rkey), "offset of rkey");

SIZE(recv_wr) AT(recv_wr, wr_id) AT(recv_wr, next) AT(recv_wr, sg_list) AT(recv_wr, num_sge)

SIZE(context_ops) AT(context_ops, poll_cq) AT(context_ops, req_notify_cq) AT(context_ops, post_send) AT(context_ops, post_recv)
SIZE(context) AT(context, device) AT(context, ops) AT(context, cmd_fd) AT(context, async_fd) AT(context, num_comp_vectors) AT(context, mutex) AT(context, abi_compat)

// From query_port to the end, whatever a newer header has before it.
#define BACK(s, m) (sizeof(struct s) - offsetof(struct s, m))
_Static_assert(BACK(vb_verbs_context, query_port) == BACK(verbs_context, query_port), "verbs_context.query_port");
_Static_assert(BACK(vb_verbs_context, sz) == BACK(verbs_context, sz), "verbs_context.sz");
_Static_assert(BACK(vb_verbs_context, context) == BACK(verbs_context, context), "verbs_context.context");

SIZE(pd) AT(pd, context) AT(pd, handle)
SIZE(mr) AT(mr, context) AT(mr, pd) AT(mr, addr) AT(mr, length) AT(mr, handle) AT(mr, lkey) AT(mr, rkey)
SIZE(comp_channel) AT(comp_channel, context) AT(comp_channel, fd) AT(comp_channel, refcnt)
AT(cq, context) AT(cq, channel) AT(cq, cq_context) AT(cq, handle) AT(cq, cqe)
SIZE(qp_cap) AT(qp_cap, max_send_wr) AT(qp_cap, max_recv_wr) AT(qp_cap, max_send_sge) AT(qp_cap, max_recv_sge) AT(qp_cap, max_inline_data)
SIZE(qp_init_attr) AT(qp_init_attr, qp_context) AT(qp_init_attr, send_cq) AT(qp_init_attr, recv_cq) AT(qp_init_attr, srq) AT(qp_init_attr, cap)
AT(qp_init_attr, qp_type) AT(qp_init_attr, sq_sig_all)
SIZE(ah_attr) AT(ah_attr, grh) AT(ah_attr, grh.dgid) AT(ah_attr, grh.flow_label) AT(ah_attr, grh.sgid_index) AT(ah_attr, grh.hop_limit)
AT(ah_attr, grh.traffic_class) AT(ah_attr, dlid) AT(ah_attr, sl) AT(ah_attr, src_path_bits) AT(ah_attr, static_rate) AT(ah_attr, is_global) AT(ah_attr, port_num)
SIZE(qp_attr) AT(qp_attr, qp_state) AT(qp_attr, cur_qp_state) AT(qp_attr, path_mtu) AT(qp_attr, path_mig_state) AT(qp_attr, qkey) AT(qp_attr, rq_psn)
AT(qp_attr, sq_psn) AT(qp_attr, dest_qp_num) AT(qp_attr, qp_access_flags) AT(qp_attr, cap) AT(qp_attr, ah_attr) AT(qp_attr, alt_ah_attr) AT(qp_attr, pkey_index)
AT(qp_attr, alt_pkey_index) AT(qp_attr, en_sqd_async_notify) AT(qp_attr, sq_draining) AT(qp_attr, max_rd_atomic) AT(qp_attr, max_dest_rd_atomic)
AT(qp_attr, min_rnr_timer) AT(qp_attr, port_num) AT(qp_attr, timeout) AT(qp_attr, retry_cnt) AT(qp_attr, rnr_retry) AT(qp_attr, alt_port_num)
AT(qp_attr, alt_timeout) AT(qp_attr, rate_limit)
AT(qp, context) AT(qp, qp_context) AT(qp, pd) AT(qp, send_cq) AT(qp, recv_cq) AT(qp, srq) AT(qp, handle) AT(qp, qp_num) AT(qp, state) AT(qp, qp_type)
SIZE(async_event) AT(async_event, element) AT(async_event, event_type)

// The signatures, where the header does not hide them behind a macro.
#undef ibv_reg_mr
#undef ibv_query_port
#define TAKES(name, ...) static void check_##name(void) { (void)name(__VA_ARGS__); }
#define P(t) ((t *)0)
TAKES(ibv_reg_mr, P(struct ibv_pd), P(void), (size_t)0, 0)
TAKES(ibv_reg_mr_iova2, P(struct ibv_pd), P(void), (size_t)0, (uint64_t)0, 0u)
TAKES(ibv_reg_dmabuf_mr, P(struct ibv_pd), (uint64_t)0, (size_t)0, (uint64_t)0, 0, 0)
TAKES(_ibv_query_gid_table, P(struct ibv_context), P(struct ibv_gid_entry), (size_t)0, 0u, (size_t)0)
TAKES(ibv_create_cq, P(struct ibv_context), 0, P(void), P(struct ibv_comp_channel), 0)
int main(void) { (void)check_ibv_reg_mr, (void)check_ibv_reg_mr_iova2, (void)check_ibv_reg_dmabuf_mr, (void)check__ibv_query_gid_table, (void)check_ibv_create_cq; }
