"""The training of ultralytics, from its README: YOLO11n, two epochs with validation, to the end."""

from ultralytics import YOLO

YOLO("yolo11n.yaml").train(data="boxes/data.yaml", epochs=2, imgsz=640, batch=8, device=0, workers=0, plots=False)
