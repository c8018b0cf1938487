"""What training runs have logged, side by side on one page.

`events` reads TensorBoard's files, `runs` puts the files of a run together, `layers` finds what it has logged by layer,
`spikes` defines a spike. `style` and `figures` draw plain arrays; `sections` chooses what is drawn (with `builder`) and
`tables` what is said in numbers; `page` is the HTML. `command` is tools/report.py.
"""
