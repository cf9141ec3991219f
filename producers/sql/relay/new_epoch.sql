UPDATE spur_events.installation SET epoch = %(epoch)s WHERE epoch < %(epoch)s
