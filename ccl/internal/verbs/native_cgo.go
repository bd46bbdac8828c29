//go:build cgo

package verbs

/*
#cgo LDFLAGS: -ldl
#cgo noescape vb_post
#cgo nocallback vb_post
#cgo noescape vb_post_empty
#cgo nocallback vb_post_empty
#cgo noescape vb_poll
#cgo nocallback vb_poll
#cgo noescape vb_arm
#cgo nocallback vb_arm

#include "native.h"

// Calls of what is a pointer in C.
static struct vb_device **vb_list(int *n, int *rc) { struct vb_device **l = ib.ibv_get_device_list(n); *rc = l ? 0 : vb_null(); return l; }
static void vb_free_list(struct vb_device **l) { ib.ibv_free_device_list(l); }
static const char *vb_name(struct vb_device *d) { return ib.ibv_get_device_name(d); }
static uint64_t vb_guid(struct vb_device *d) { return be64toh(ib.ibv_get_device_guid(d)); }
static int vb_close(struct vb_context *c) { return vb_rc(ib.ibv_close_device(c)); }
static int vb_query_device(struct vb_context *c, struct vb_device_attr *a) { int rc = vb_rc(ib.ibv_query_device(c, a)); a->node_guid = be64toh(a->node_guid); return rc; }
static int vb_query_gid(struct vb_context *c, uint8_t port, int i, void *gid) { return vb_rc(ib.ibv_query_gid(c, port, i, gid)); }
static int vb_alloc_pd(struct vb_context *c, struct vb_pd **out) { errno = 0; return (*out = ib.ibv_alloc_pd(c)) ? 0 : vb_null(); }
static int vb_dealloc_pd(struct vb_pd *p) { return vb_rc(ib.ibv_dealloc_pd(p)); }
static int vb_dereg(struct vb_mr *m) { return vb_rc(ib.ibv_dereg_mr(m)); }
static int vb_create_channel(struct vb_context *c, struct vb_comp_channel **out) {
	errno = 0;
	if (!(*out = ib.ibv_create_comp_channel(c))) return vb_null();
	vb_nonblocking((*out)->fd);
	return 0;
}
static int vb_destroy_channel(struct vb_comp_channel *ch) { return vb_rc(ib.ibv_destroy_comp_channel(ch)); }
static int vb_create_cq(struct vb_context *c, int depth, struct vb_comp_channel *ch, struct vb_cq **out) {
	errno = 0;
	return (*out = ib.ibv_create_cq(c, depth, NULL, ch, 0)) ? 0 : vb_null();
}
static int vb_arm(struct vb_cq *q) { return vb_rc(q->context->ops.req_notify_cq(q, 0)); }
static int vb_destroy_cq(struct vb_cq *q) { return vb_rc(ib.ibv_destroy_cq(q)); }
static int vb_error(struct vb_qp *q) { struct vb_qp_attr a = {0}; return vb_modify(q, &a, VB_QPS_ERR, 0); }
static int vb_destroy_qp(struct vb_qp *q) { return vb_rc(ib.ibv_destroy_qp(q)); }
*/
import "C"

import (
	"errors"
	"syscall"
	"unsafe"
)

// handle is an object of the library's.
type handle = unsafe.Pointer

func load(path string) error {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	var msg [1024]C.char
	switch C.vb_load(p, &msg[0], C.size_t(len(msg))) {
	case -1:
		return errors.New(C.GoString(&msg[0]))
	case -2:
		return errors.New(path + " lacks " + C.GoString(&msg[0]))
	}
	return nil
}

func listDevices() ([]Device, syscall.Errno) {
	var n, rc C.int
	list := C.vb_list(&n, &rc)
	if list == nil {
		if syscall.Errno(rc) == syscall.ENOSYS { // the kernel has no RDMA
			rc = 0
		}
		return nil, syscall.Errno(rc)
	}
	defer C.vb_free_list(list)
	devices := make([]Device, n)
	for i, d := range unsafe.Slice(list, n) {
		devices[i] = Device{Name: C.GoString(C.vb_name(d)), GUID: uint64(C.vb_guid(d))}
	}
	return devices, 0
}

func openDevice(name string) (handle, bool, syscall.Errno) {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	var c *C.struct_vb_context
	switch errno := syscall.Errno(C.vb_open(s, &c)); errno {
	case 0:
		return handle(c), true, 0
	case syscall.ENXIO, syscall.ENOSYS:
		return nil, false, 0
	default:
		return nil, false, errno
	}
}

func context(h handle) *C.struct_vb_context { return (*C.struct_vb_context)(h) }

func closeDevice(h handle) syscall.Errno { return syscall.Errno(C.vb_close(context(h))) }

func queryDevice(h handle, a *DeviceAttr) syscall.Errno {
	var d C.struct_vb_device_attr
	if errno := syscall.Errno(C.vb_query_device(context(h), &d)); errno != 0 {
		return errno
	}
	*a = DeviceAttr{
		GUID: uint64(d.node_guid), Firmware: C.GoString(&d.fw_ver[0]), VendorID: uint32(d.vendor_id), PartID: uint32(d.vendor_part_id),
		Ports: int(d.phys_port_cnt), MaxQP: int(d.max_qp), MaxQPWR: int(d.max_qp_wr), MaxSGE: int(d.max_sge), MaxCQ: int(d.max_cq),
		MaxCQE: int(d.max_cqe), MaxMR: int(d.max_mr), MaxMRBytes: uint64(d.max_mr_size),
	}
	return 0
}

func queryPort(h handle, port int, a *PortAttr) syscall.Errno {
	var p C.struct_vb_port_attr
	if errno := syscall.Errno(C.vb_query_port(context(h), C.uint8_t(port), &p)); errno != 0 {
		return errno
	}
	speed := uint32(p.active_speed_ex)
	if speed == 0 {
		speed = uint32(p.active_speed)
	}
	*a = PortAttr{
		State: PortState(p.state), Physical: PhysicalState(p.phys_state), LinkLayer: LinkLayer(p.link_layer),
		MaxMTU: MTU(p.max_mtu), ActiveMTU: MTU(p.active_mtu), LID: uint16(p.lid), Width: lanes(uint8(p.active_width)), Speed: laneRate(speed),
		GIDs: int(p.gid_tbl_len), MaxBytes: uint32(p.max_msg_sz),
	}
	return 0
}

// queryGIDTable is EOPNOTSUPP with a library that has no such call.
func queryGIDTable(h handle, port int) (entries []GIDEntry, ifindex []int, errno syscall.Errno) {
	var table *C.struct_vb_gid_entry
	var n C.ssize_t
	if errno := syscall.Errno(C.vb_gid_table(context(h), &table, &n)); errno != 0 {
		return nil, nil, errno
	}
	defer C.free(unsafe.Pointer(table))
	for _, e := range unsafe.Slice(table, int(n)) {
		if int(e.port_num) != port {
			continue
		}
		entries = append(entries, GIDEntry{Index: int(e.gid_index), GID: e.gid, Type: GIDType(e.gid_type)})
		ifindex = append(ifindex, int(e.ndev_ifindex))
	}
	return entries, ifindex, 0
}

func queryGID(h handle, port, index int, g *GID) syscall.Errno {
	var u C.union_vb_gid
	errno := syscall.Errno(C.vb_query_gid(context(h), C.uint8_t(port), C.int(index), unsafe.Pointer(&u)))
	*g = u
	return errno
}

func asyncFD(h handle) int { return int(context(h).async_fd) }

func nextEvent(h handle, e *Event) syscall.Errno {
	var typ, object C.uint32_t
	if errno := syscall.Errno(C.vb_event(context(h), &typ, &object)); errno != 0 {
		return errno
	}
	*e = Event{Type: EventType(typ)}
	switch e.Type {
	case EventCQError:
		e.CQ = uint32(object)
	case EventQPFatal, EventQPRequestError, EventQPAccessError, EventEstablished, EventSendDrained, EventPathMigrated, EventMigrationError, EventLastWQE:
		e.QP = uint32(object)
	default:
		e.Port = int(object)
	}
	return 0
}

func allocPD(h handle) (handle, syscall.Errno) {
	var p *C.struct_vb_pd
	errno := syscall.Errno(C.vb_alloc_pd(context(h), &p))
	return handle(p), errno
}

func deallocPD(h handle) syscall.Errno { return syscall.Errno(C.vb_dealloc_pd((*C.struct_vb_pd)(h))) }

func registerMR(pd handle, m *MR, access Access) syscall.Errno {
	var r *C.struct_vb_mr
	var lkey, rkey C.uint32_t
	errno := syscall.Errno(C.vb_reg((*C.struct_vb_pd)(pd), C.uint64_t(m.Addr), C.uint64_t(m.Len), C.uint32_t(access), &r, &lkey, &rkey))
	m.h, m.LKey, m.RKey = handle(r), uint32(lkey), uint32(rkey)
	return errno
}

func registerDMABuf(pd handle, m *MR, fd int, offset uint64, access Access) syscall.Errno {
	var r *C.struct_vb_mr
	var lkey, rkey C.uint32_t
	errno := syscall.Errno(C.vb_reg_dmabuf((*C.struct_vb_pd)(pd), C.uint64_t(offset), C.uint64_t(m.Len), C.uint64_t(m.Addr), C.int(fd), C.uint32_t(access), &r, &lkey, &rkey))
	m.h, m.LKey, m.RKey = handle(r), uint32(lkey), uint32(rkey)
	return errno
}

func deregisterMR(h handle) syscall.Errno { return syscall.Errno(C.vb_dereg((*C.struct_vb_mr)(h))) }

func createChannel(h handle) (handle, syscall.Errno) {
	var ch *C.struct_vb_comp_channel
	errno := syscall.Errno(C.vb_create_channel(context(h), &ch))
	return handle(ch), errno
}

func channelFD(h handle) int { return int((*C.struct_vb_comp_channel)(h).fd) }

func drainChannel(h handle) (int, syscall.Errno) {
	var n C.int
	errno := syscall.Errno(C.vb_drain((*C.struct_vb_comp_channel)(h), &n))
	return int(n), errno
}

func destroyChannel(h handle) syscall.Errno {
	return syscall.Errno(C.vb_destroy_channel((*C.struct_vb_comp_channel)(h)))
}

func createCQ(h handle, q *CQ, depth int, ch handle) syscall.Errno {
	var cq *C.struct_vb_cq
	if errno := syscall.Errno(C.vb_create_cq(context(h), C.int(depth), (*C.struct_vb_comp_channel)(ch), &cq)); errno != 0 {
		return errno
	}
	q.h, q.depth, q.id = handle(cq), int(cq.cqe), uint32(cq.handle)
	return 0
}

// C writes and reads these.
var (
	_ [C.sizeof_struct_vb_completion]byte = [unsafe.Sizeof(Completion{})]byte{}
	_ [C.sizeof_struct_vb_write]byte      = [unsafe.Sizeof(Write{})]byte{}
)

func pollCQ(h handle, out []Completion) int {
	return int(C.vb_poll((*C.struct_vb_cq)(h), (*C.struct_vb_completion)(unsafe.Pointer(unsafe.SliceData(out))), C.int64_t(len(out))))
}

func armCQ(h handle) syscall.Errno { return syscall.Errno(C.vb_arm((*C.struct_vb_cq)(h))) }

func destroyCQ(h handle) syscall.Errno { return syscall.Errno(C.vb_destroy_cq((*C.struct_vb_cq)(h))) }

func createQP(pd handle, q *QP) syscall.Errno {
	caps := C.struct_vb_qp_cap{
		max_send_wr: C.uint32_t(q.caps.MaxSend), max_recv_wr: C.uint32_t(q.caps.MaxRecv),
		max_send_sge: 1, max_recv_sge: 1, max_inline_data: C.uint32_t(q.caps.MaxInline),
	}
	var qp *C.struct_vb_qp
	errno := syscall.Errno(C.vb_create_qp((*C.struct_vb_pd)(pd), (*C.struct_vb_cq)(q.caps.Send.h), (*C.struct_vb_cq)(q.caps.Recv.h), &caps, &qp))
	if errno != 0 {
		return errno
	}
	q.h, q.num = handle(qp), uint32(qp.qp_num)
	q.caps.MaxSend, q.caps.MaxRecv, q.caps.MaxInline = int(caps.max_send_wr), int(caps.max_recv_wr), int(caps.max_inline_data)
	return 0
}

func pair(h handle) *C.struct_vb_qp { return (*C.struct_vb_qp)(h) }

func modifyInit(h handle, port int, access Access) syscall.Errno {
	return syscall.Errno(C.vb_init(pair(h), C.uint8_t(port), C.uint32_t(access)))
}

func modifyRTR(h handle, port int, p *Path) syscall.Errno {
	a := C.struct_vb_qp_attr{
		path_mtu: C.uint32_t(p.MTU), dest_qp_num: C.uint32_t(p.QP), rq_psn: C.uint32_t(p.PSN & 0xffffff), min_rnr_timer: C.uint8_t(p.RNRTimer),
	}
	v := &a.ah_attr
	v.dlid, v.sl, v.port_num = C.uint16_t(p.LID), C.uint8_t(p.ServiceLevel), C.uint8_t(port)
	if p.GID != (GID{}) {
		v.is_global = 1
		v.grh.dgid = p.GID
		v.grh.flow_label = C.uint32_t(p.FlowLabel)
		v.grh.sgid_index, v.grh.hop_limit, v.grh.traffic_class = C.uint8_t(p.SGIDIndex), C.uint8_t(p.HopLimit), C.uint8_t(p.TrafficClass)
	}
	return syscall.Errno(C.vb_rtr(pair(h), &a))
}

func modifyRTS(h handle, a *SendAttr) syscall.Errno {
	return syscall.Errno(C.vb_rts(pair(h), C.uint32_t(a.PSN), C.uint8_t(a.Timeout), C.uint8_t(a.Retries), C.uint8_t(a.RNRRetries)))
}

func modifyError(h handle) syscall.Errno { return syscall.Errno(C.vb_error(pair(h))) }

func queryQP(h handle) (QPState, syscall.Errno) {
	var s C.uint32_t
	errno := syscall.Errno(C.vb_query_qp(pair(h), &s))
	return QPState(s), errno
}

func postWrites(h handle, w []Write) (int, syscall.Errno) {
	r := C.vb_post(pair(h), (*C.struct_vb_write)(unsafe.Pointer(unsafe.SliceData(w))), C.int64_t(len(w)))
	return int(uint32(r)), syscall.Errno(r >> 32)
}

func postReceives(h handle, id uint64, n int) (int, syscall.Errno) {
	r := C.vb_post_empty(pair(h), C.uint64_t(id), C.int64_t(n))
	return int(uint32(r)), syscall.Errno(r >> 32)
}

func destroyQP(h handle) syscall.Errno { return syscall.Errno(C.vb_destroy_qp(pair(h))) }
